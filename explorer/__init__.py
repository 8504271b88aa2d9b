"""See the forward and backward traces a notebook cell really ran, toggle optimisation passes, measure, export."""
