"""Profile layers: what each layer of a step costs on each kind of submesh."""
