"""Drawing tools that figures share: charts with one style, numbers and names as text, and the views of a figure."""
