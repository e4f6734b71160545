"""Values that are passed around and depend on nothing above: limits, arguments, options, messages."""
