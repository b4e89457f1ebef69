"""micro-vlm: a very small vision-language model, its pictures, its training and its evaluation."""
