"""The records behind the tables, one module per table. Import from the modules: none of them loads torch."""
