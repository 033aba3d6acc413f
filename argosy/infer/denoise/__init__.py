"""Images from noise: samplers as tables (`plan`, `samplers`), guidance, and diffusers' names of them (`hub`)."""
