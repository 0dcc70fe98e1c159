"""The instruments of the ladder, shared by the notebooks, the tests and the command line."""
