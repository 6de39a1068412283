"""What `mass demo` shows: real experts, carried here or made by the vision suite, in a folder to play with."""
