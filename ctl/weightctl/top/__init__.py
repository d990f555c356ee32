"""`weightctl top`: models, processes and tenants, live; printed once where nobody looks."""
