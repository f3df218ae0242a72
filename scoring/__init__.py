"""The contest's rules, reports and the command line."""
