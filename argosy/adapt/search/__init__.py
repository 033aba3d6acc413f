"""A mixed recipe: the number format of each matrix of a model, under a budget of bits a weight."""
