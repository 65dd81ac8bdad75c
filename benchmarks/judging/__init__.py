"""What the judges of the search share. It asks the planner for plans and for prices, and never how it found them."""
