"""The pages of a radix tree."""


def tree_pages(node):
    """Lists the pages of a node and of all after it."""
    return node.pages.tolist() + [page for child in node.children.values() for page in tree_pages(child)]
