"""A vision-language run on charts, digits, pictures and text: the model answers questions. See ``__main__``."""
