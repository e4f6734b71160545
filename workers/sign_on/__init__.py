"""The process where clients sign on."""
