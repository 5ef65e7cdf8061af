"""From the names and layouts of torchtitan's own models (pytorch/torchtitan, `torchtitan/models`) to the file's."""
