"""What `callbacks/torch_compile` alone needs: what it counts, and where compiled graphs are kept."""
