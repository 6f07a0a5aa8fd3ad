"""From a training graph and a plan to what one rank trains, and the steps of its rounds."""
