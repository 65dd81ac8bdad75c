"""Prices, decisions and placement programs on record in full precision, to hold a rebuilt planner against."""
