"""Tables in Markdown, read back."""


def rows(text: str) -> list[list[str]]:
    """The cells of all tables, without rules."""
    lines = [line for line in text.splitlines() if line.startswith("|") and "--" not in line]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
