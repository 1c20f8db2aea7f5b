"""The tests; a folder for each package of autopar."""
