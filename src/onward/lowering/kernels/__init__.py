"""What operators compute with: torch functions of our own, element types, memory layouts, values of the host."""
