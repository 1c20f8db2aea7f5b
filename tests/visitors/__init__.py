"""A stranger's first hour: commands on the package of a wheel, in an environment without its extras."""
