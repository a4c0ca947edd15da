"""What engines of one host share: a keeper has the catalog, and each engine's mover moves its own bytes."""
