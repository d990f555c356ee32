"""The command `weightctl top`: a live view of models, processes and tenants. Without a terminal it prints tables."""
