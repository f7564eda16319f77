"""The op vocabulary, the Builder that models use, passes over programs and the cost of every op."""
