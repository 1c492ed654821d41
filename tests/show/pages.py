"""Pages as tests read them: elements, texts, tables; and words that try to be more."""

import html.parser

HOSTILE = "</script><script>alert(1)</script><img src=x>$x_{ & \"q\" 'p' <!-- --> ]]>"
VOID = {"meta", "path", "use", "rect", "image"}


class Page(html.parser.HTMLParser):
    """The elements of a page, its tables' rows, its texts by element."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.rows, self.texts = [], [], [], []
        self.open = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *attr) for attr in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *attr) for attr in attrs]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        here = self.open[-1] if self.open else ""
        self.texts.append((here, data))
        if here in ("td", "th"):
            self.rows[-1].append(data)

    def text(self, tag) -> list[str]:
        return [data for here, data in self.texts if here == tag]
