"""Which initializers are trainable weights, by which evidence, and what people call them."""
