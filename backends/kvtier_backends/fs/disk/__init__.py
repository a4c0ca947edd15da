"""The disk: what both layouts stand on."""
