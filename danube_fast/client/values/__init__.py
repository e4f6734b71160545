"""What is passed around and depends on nothing above: limits, arguments, options, messages."""
