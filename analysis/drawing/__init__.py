"""Drawing tools that figures share: style and axes, names and values of marks, numbers as text, and the SVG of a
figure.
"""
