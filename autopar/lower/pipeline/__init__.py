"""From a pipeline plan to stage programs and instruction lists."""
