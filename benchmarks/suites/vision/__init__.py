"""The vision suite: DINOv2 ViT-S/14 at 98 pixels and tasks from digits to X-ray images."""
