"""Domains that come with headrace."""
