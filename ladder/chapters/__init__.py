"""What the notebooks call: tables, pictures, explorers and exercises of the chapters."""
