"""Any batch size for a graph whose export fixed one: the batch followed through it, stored shapes rewritten."""
