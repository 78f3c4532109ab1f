"""The processes of a run: who this one is, sums over all of them, and the watch that ends all with one error."""
