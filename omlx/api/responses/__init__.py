"""OpenAI's Responses endpoint: input and output are lists of items, and answers can be kept to go on from."""
