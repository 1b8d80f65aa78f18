"""Integrations that run models of other packages on this package's attention."""
