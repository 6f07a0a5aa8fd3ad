"""The best layout: a summary of the network, a model of the hardware, and a search over all layouts with both."""
