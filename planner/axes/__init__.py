"""The axes of parallelism, a file each: what each allows, and how it lowers a unit of the model to one rank."""
