"""One module per family of operators; importing a module registers its lowerings."""
