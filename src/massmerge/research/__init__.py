"""The paper's experiments: studies, other routed methods, interpretation."""
