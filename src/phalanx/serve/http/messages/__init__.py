"""The wire types of OpenAI's two interfaces: requests read and refused by name, answers and errors written."""
