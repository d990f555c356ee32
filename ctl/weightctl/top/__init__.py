"""`weightctl top`: a live view of models, processes and tenants; without a terminal, the tables are printed once."""
