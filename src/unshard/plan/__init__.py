"""From a target to a plan: compile, prove, print, save."""
