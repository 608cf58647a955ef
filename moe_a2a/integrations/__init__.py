"""What connects moe_a2a to other libraries. Nothing here is imported by ``import moe_a2a`` beyond what needs torch alone."""
