"""Cache managers and serving engines, translated to layouts and spans."""
