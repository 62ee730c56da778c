"""A module for each framework, with the functions of the library."""
