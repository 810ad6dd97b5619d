"""The one room that imports Ray."""
