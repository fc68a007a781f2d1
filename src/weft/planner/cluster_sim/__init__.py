"""What a run meets on a cluster: its step as a picture, slow devices and links, failures, replicas
that wait for one another or not, and more devices. No torch."""
