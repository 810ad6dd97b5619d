"""Prompts: files and generators, the order in which they are drawn, packed supervised examples."""
