"""Tiers that engines of one host share: a keeper has the catalog, and each engine moves its own bytes."""
