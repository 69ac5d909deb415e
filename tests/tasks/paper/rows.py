"""A few rows of every task, written for these tests in the format of the public dataset.

Each comes with what a perfect reader answers: the number of the right choice, the text it continues with, or nothing
where the task is to predict the row itself.
"""

from __future__ import annotations

from typing import Any

Answer = int | str | None

ROWS: dict[str, list[tuple[dict[str, Any], Answer]]] = {
    "wikitext": [
        ({"page": " = The mill = \n\n The mill stands by the river , and its wheel turns . \n"}, None),
        ({"page": " = The bridge = \n\n A bridge of 12 @,@ 000 stones crosses it . \n"}, None),
    ],
    "lambada_openai": [
        ({"text": "The baker opened the oven and took out the bread"}, " bread"),
        ({"text": "She lost the key, so nobody could open the door"}, " door"),
    ],
    "piqa": [
        ({"goal": "Dry a wet shirt", "sol1": "Hang it in the sun.", "sol2": "Put it in the river.", "label": 0}, 0),
        ({"goal": "Cool some soup", "sol1": "Light the stove.", "sol2": "Leave it on the table.", "label": 1}, 1),
    ],
    "hellaswag": [
        (
            {
                "ind": 1,
                "activity_label": "Baking",
                "ctx_a": "A woman mixes flour and water.",
                "ctx_b": "she",
                "ctx": "A woman mixes flour and water. she",
                "endings": ["paints a door.", "kneads the dough.", "reads the river.", "sells a boat."],
                "source_id": "written~1",
                "split": "val",
                "split_type": "indomain",
                "label": "1",
            },
            1,
        ),
        (
            {
                "ind": 2,
                "activity_label": "Home and Garden",
                "ctx_a": "[header] How to plant a tree [title] Dig a hole.",
                "ctx_b": "",
                "ctx": "[header] How to plant a tree [title] Dig a hole.",
                "endings": ["Set the tree in it.", "Boil it.", "Sing to the bridge.", "Sell the hole."],
                "source_id": "written~2",
                "split": "val",
                "split_type": "indomain",
                "label": "0",
            },
            0,
        ),
    ],
    "winogrande": [
        (
            {
                "sentence": "The cup did not fit in the box because the _ was too small.",
                "option1": "cup",
                "option2": "box",
                "answer": "2",
            },
            1,
        ),
        (
            {
                "sentence": "Mia thanked Noa because _ had been helped.",
                "option1": "Mia",
                "option2": "Noa",
                "answer": "1",
            },
            0,
        ),
    ],
    "arc_easy": [
        (
            {
                "id": "written_1",
                "question": "Which of these is a liquid at room temperature?",
                "choices": {"text": ["stone", "water", "iron", "wood"], "label": ["A", "B", "C", "D"]},
                "answerKey": "B",
            },
            1,
        ),
        (
            {
                "id": "written_2",
                "question": "What do plants take from the sun?",
                "choices": {"text": ["light", "sand", "salt"], "label": ["1", "2", "3"]},
                "answerKey": "1",
            },
            0,
        ),
    ],
    "arc_challenge": [
        (
            {
                "id": "written_3",
                "question": "A ball rolls more slowly on grass than on ice. Which force differs most?",
                "choices": {"text": ["gravity", "magnetism", "friction"], "label": ["A", "B", "C"]},
                "answerKey": "C",
            },
            2,
        ),
        (
            {
                "id": "written_4",
                "question": "Why is it colder on a mountain?",
                "choices": {"text": ["The air is thinner.", "The sun is farther."], "label": ["A", "B"]},
                "answerKey": "A",
            },
            0,
        ),
    ],
    "social_iqa": [
        (
            {
                "context": "Ada broke her neighbour's window.",
                "question": "What will Ada want to do next?",
                "answerA": "go to sleep",
                "answerB": "say sorry",
                "answerC": "buy a boat",
                "label": "2",
            },
            1,
        ),
        (
            {
                "context": "Ben won the race.",
                "question": "How would Ben feel?",
                "answerA": "proud",
                "answerB": "thirsty for salt",
                "answerC": "lost",
                "label": "1",
            },
            0,
        ),
    ],
    "boolq": [
        ({"question": "is the mill by the river", "passage": "The mill stands by the river.", "idx": 0, "label": 1}, 1),
        ({"question": "is the bridge made of wood", "passage": "The bridge is of stone.", "idx": 1, "label": 0}, 0),
    ],
    "swde": [
        (
            {
                "doc_id": "1",
                "file_name": "film.htm",
                "key": "director",
                "value": "Ida Holm",
                "text": "The Mill (1951). Director: Ida Holm. Length: 90 min. Director:",
            },
            "Ida Holm",
        ),
        (
            {
                "doc_id": "2",
                "file_name": "film2.htm",
                "key": "length",
                "value": "88 min",
                "text": " The Bridge (1960). Length: 88 min. Colour: yes. Length: ",
            },
            "88 min",
        ),
    ],
    "nq_completion": [
        (
            {
                "context": "The bridge was built in 1820. It has nine arches.",
                "question": "The bridge has this many arches:",
                "answers": ["nine", "9"],
            },
            "9",
        ),
        (
            {
                "context": "Water from the mill runs to the lake.",
                "question": "Water from the mill runs to",
                "answers": ["the lake"],
            },
            "The Lake, where",
        ),
    ],
    "drop_completion": [
        (
            {
                "context": "The reds scored 3 goals, the blues 5.",
                "question": "More goals were scored by the",
                "answers": ["blues"],
            },
            "blues",
        ),
        (
            {
                "context": "In May 4 ships came, in June 2.",
                "question": "The number of ships in May was",
                "answers": ["4"],
            },
            "4",
        ),
    ],
    # Every value is a date: guessed types would make time stamps of them.
    "fda": [
        (
            {
                "doc_id": "1",
                "file_name": "k1.txt",
                "key": "date prepared",
                "value": "2001-05-03",
                "text": "510(k) summary. Date prepared: 2001-05-03. Device: pump. Date prepared:",
            },
            "2001-05-03",
        ),
        (
            {
                "doc_id": "2",
                "file_name": "k2.txt",
                "key": "date prepared",
                "value": "2002-11-30",
                "text": "510(k) summary. Device: valve. Date prepared: 2002-11-30. Date prepared:",
            },
            "2002-11-30",
        ),
    ],
    "squad_completion": [
        (
            {
                "doc_id": "1",
                "title": "Mill",
                "question": "Where does the mill stand?",
                "value": "by the river",
                "text": "The mill stands by the river and is old. The mill stands",
            },
            "by the river",
        ),
        (
            {
                "doc_id": "2",
                "title": "Bridge",
                "question": "What is the bridge made of?",
                "value": "stone",
                "text": "The bridge is made of stone. The bridge is made of",
            },
            "stone",
        ),
    ],
    "triviaqa_completion": [
        (
            {
                "context": "[DOC] [TLE] The mill [PAR] Ida Holm built the mill.",
                "question": "The mill was built by",
                "answers": ["Ida Holm", "Holm"],
            },
            "Ms Holm",
        ),
        (
            {
                "context": "[DOC] [TLE] The lake [PAR] The lake is called Wend.",
                "question": "The name of the lake is",
                "answers": ["Wend"],
            },
            "Wend",
        ),
    ],
}
