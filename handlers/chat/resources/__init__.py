"""OpenAI's stored responses, conversations and files, which are sessions and their turns."""
